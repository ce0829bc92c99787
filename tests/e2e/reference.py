"""transformers' own greedy continuations in fp32, and the comparison with ours."""

from __future__ import annotations

import warnings
from typing import Any

TIE = 1e-3


class Reference:
    """transformers' own model on the same weights, with its own attention and cache."""

    def __init__(self, path: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._torch = torch
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._tokenizer = AutoTokenizer.from_pretrained(path)

    def tokenize(self, text: str) -> list[int]:
        """The ids of a prompt."""
        return list(self._tokenizer(text)["input_ids"])

    def text(self, tokens: list[int]) -> str:
        """What they say."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def generate(self, prompt: list[int], count: int) -> list[int]:
        """Greedy tokens, end of text ignored."""
        torch = self._torch
        with torch.inference_mode():
            out: Any = self.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return list(out[0, len(prompt) :].tolist())

    def top_two(self, prefix: list[int]) -> tuple[float, float]:
        """The two best next-token logits."""
        torch = self._torch
        with torch.inference_mode():
            best = self.model(torch.tensor([prefix])).logits[0, -1].topk(2).values
        return float(best[0]), float(best[1])

    def assert_equal(self, prompt: list[int], ours: list[int], theirs: list[int]) -> None:
        """Token for token. A near-tie (the two best logits closer than `TIE`) may go either way in floating point: it
        is reported with both logits, and the comparison of that prompt ends there."""
        assert len(ours) == len(theirs)
        for position, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            if our == their:
                continue
            first, second = self.top_two(prompt + theirs[:position])
            where = f"prompt of {len(prompt)} tokens, output {position}: ours {our}, transformers {their}"
            assert first - second < TIE, f"{where} (logits {first:.6f} > {second:.6f})"
            warnings.warn(f"near-tie: {where} (logits {first:.6f} and {second:.6f})", stacklevel=2)
            return
