"""A pasted deployment -> the words of one ``vllm serve``: shell, docker, podman, compose, Kubernetes, JSON.

Nothing is run and no variable of this machine is looked at: only what the text itself says is used.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from pdkv.errors import ConfigError

MOST_CHARACTERS = 1 << 20
_MOST_NODES = 20_000
_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main", "vllm.entrypoints.api_server", "vllm")
_SHELLS = ("bash", "sh", "zsh", "dash")
_CONTAINERS = ("docker", "podman", "nerdctl")
_PROGRAMS = (*_SHELLS, *_CONTAINERS, "python", "python3", "python3.11", "python3.12", "ray", "sleep", "nginx", "curl")
# Options of `docker run` that take no value; all others take one.
_DOCKER_SWITCHES = {
    "-d", "--detach", "-i", "--interactive", "-t", "--tty", "-it", "-ti", "-itd", "-dit", "-td", "-P", "--publish-all",
    "--rm", "--privileged", "--init", "--read-only", "--no-healthcheck", "--oom-kill-disable", "-q", "--quiet",
    "--disable-content-trust", "--sig-proxy", "--help",
}  # fmt: skip
_OTHERS = ("sglang", "trtllm-serve", "tritonserver", "lmdeploy", "text-generation-launcher")
_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)=(?P<value>.*)", re.DOTALL)
_VARIABLE = re.compile(
    r"\$(?:\{(?P<braced>[A-Za-z_]\w*)(?::?-(?P<default>[^}]*))?\}|\((?P<k8s>[A-Za-z_]\w*)\)|(?P<bare>[A-Za-z_]\w*))"
)
_QUOTES = str.maketrans({"“": '"', "”": '"', "„": '"', "‘": "'", "’": "'", "\u00a0": " "})
_HOW = "paste one command such as: vllm serve MODEL --tensor-parallel-size 2"


@dataclass(frozen=True, slots=True)
class ServeCall:
    """The words after ``vllm serve`` (or the image), what the text sets in the environment, and the image."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    image: str | None = None

    @property
    def role(self) -> str | None:
        """The ``kv_role`` that its connector plays, as far as a look at the words can tell."""
        found = re.search(r"kv_(?:consumer|producer|both)", " ".join(self.arguments))
        return None if found is None else found[0]


def read_command(text: str) -> ServeCall:
    """The one ``vllm serve`` in ``text``; of several, the one that is a decode instance (``kv_consumer``).

    Raises ConfigError when there is none, when it cannot be read, or when several could be meant.
    """
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(f"--command: {len(text):,} characters are no command; {_HOW}")
    text = text.translate(_QUOTES).strip()
    if not text:
        raise ConfigError(f"--command: the text is empty; {_HOW}")
    calls = list(_from_yaml(text)) if _looks_like_yaml(text) else list(_from_shell(text, {}))
    distinct = list(dict.fromkeys((call.arguments, tuple(call.environment.items()), call.image) for call in calls))
    if len(distinct) > 1:
        decoding = [call for call in calls if call.role == "kv_consumer"]
        if len(decoding) != 1:
            raise ConfigError(f"--command: the text holds {len(distinct)} vLLM servers; paste one of them")
        return decoding[0]
    if not calls:
        other = next((name for name in _OTHERS if re.search(rf"\b{re.escape(name)}\b", text)), None)
        said = f"this starts {other}, not vLLM" if other else "no vLLM server is started here"
        raise ConfigError(f"--command: {said}; {_HOW}")
    return calls[0]


# ------------------------------------------------------------------------------------------------------------- shells


def _from_shell(text: str, environment: Mapping[str, str]) -> Iterator[ServeCall]:
    known = dict(environment)
    for line in _logical_lines(text):
        for words in _simple_commands(line):
            yield from _from_words(words, known)


def _logical_lines(text: str) -> list[str]:
    """Lines with their continuations: after a backslash (also with blanks behind it), or before a line of options."""
    found: list[str] = []
    continues = False
    for raw in re.split(r"\r?\n", text):
        line = raw.rstrip()
        if line.lstrip().startswith("#"):
            continue
        line = re.sub(r"^\s*\$\s+(?=\S)", "", line) if not found else line
        ends = line.endswith(("\\", " ^", " `"))
        body = line[:-1] if ends else line
        if found and (continues or body.lstrip().startswith("-") or _open_quote(found[-1])):
            found[-1] += ("\n" if _open_quote(found[-1]) else " ") + body
        elif body.strip():
            found.append(body)
        continues = ends
    return found


def _open_quote(text: str) -> bool:
    """Whether a quote that ``text`` opens is still open at its end."""
    quote = ""
    skip = False
    for character in text:
        if skip:
            skip = False
        elif character == "\\" and quote != "'":
            skip = True
        elif quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
    return bool(quote)


def _simple_commands(line: str) -> Iterator[list[str]]:
    """The words of every command of a line: split at ``;``, ``&&``, ``|``, ``&``; redirections left out."""
    # Redirections of one word each, so that the `2` of `-tp 2 > log` stays an argument.
    line = re.sub(r"(?<=\s)\d?>&\d(?=\s|$)", " ", line)
    line = re.sub(r"(?<=\s)&(?=>)", "", line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    target = False
    try:
        for token in lexer:
            if token and not token.strip(";&|"):
                yield words
                words = []
            elif target:
                target = False
            elif redirection := re.fullmatch(r"\d?(?:>>?|<)(.*)", token):
                target = not redirection[1]
            elif token.startswith("#"):
                break
            else:
                words.append(_straight_dashes(token))
    except ValueError as error:
        raise ConfigError(
            f"--command: {error} in {_shown(line)}; close the quote, or quote JSON as '{{...}}'"
        ) from error
    yield words


def _straight_dashes(word: str) -> str:
    """Options whose dashes a word processor made long."""
    return re.sub(r"^[–—]-?(?=[A-Za-z])", "--", word)


def _from_words(words: list[str], known: dict[str, str]) -> Iterator[ServeCall]:
    """The servers that one command starts; its assignments are added to ``known``."""
    own: dict[str, str] = {}
    rest = list(words)
    while rest and (
        rest[0] in ("export", "env", "set", "nohup", "exec", "sudo", "time") or _ASSIGNMENT.fullmatch(rest[0])
    ):
        match = _ASSIGNMENT.fullmatch(rest[0])
        if match:
            own[match["name"]] = _expanded(match["value"], known)
        rest = rest[1:]
    if not rest:
        known.update(own)
        return
    environment = {**known, **own}
    rest = [_expanded(word, environment) for word in rest]
    yield from _server(rest, environment, None)


def _server(words: list[str], environment: Mapping[str, str], image: str | None) -> Iterator[ServeCall]:
    """The ``vllm serve`` in the words of a command, whatever wraps it."""
    names = [PurePosixPath(word).name for word in words]
    for index, name in enumerate(names):
        if name in _CONTAINERS and names[index + 1 : index + 2] == ["run"]:
            yield from _docker_run(words[index + 2 :], environment)
            return
        if name in _SHELLS and any(re.fullmatch(r"-[a-z]*c[a-z]*", word) for word in words[index + 1 : index + 3]):
            flag = next(at for at in range(index + 1, len(words)) if re.fullmatch(r"-[a-z]*c[a-z]*", words[at]))
            script = " ".join(words[flag + 1 : flag + 2])
            for call in _from_shell(script, environment):
                yield ServeCall(call.arguments, call.environment, call.image or image)
            return
        if name == "vllm" and words[index + 1 : index + 2] == ["serve"]:
            yield ServeCall(tuple(words[index + 2 :]), environment, image)
            return
        if (words[index - 1 : index] == ["-m"] and words[index] in _MODULES) or name == "api_server.py":
            tail = words[index + 1 :]
            yield ServeCall(tuple(tail[1:] if tail[:1] == ["serve"] else tail), environment, image)
            return
    first = names[0] if names else "--"
    program = first in _PROGRAMS or first.endswith((".py", ".sh"))
    model = re.fullmatch(r"[\w.-]+/[\w.-]+", words[0] if words else "") and any(word.startswith("--") for word in words)
    if (words and words[0].startswith("--")) or model or (image is not None and "vllm" in image and not program):
        yield ServeCall(tuple(words[1:] if words[:1] == ["serve"] else words), environment, image)


def _docker_run(words: list[str], environment: Mapping[str, str]) -> Iterator[ServeCall]:
    inside = dict(environment)
    entrypoint: list[str] = []
    index = 0
    while index < len(words) and words[index].startswith("-"):
        word, value = words[index], ""
        index += 1
        if "=" in word and word.startswith("--"):
            word, value = word.split("=", 1)
        elif word not in _DOCKER_SWITCHES:
            value = words[index] if index < len(words) else ""
            index += 1
        match = _ASSIGNMENT.fullmatch(value)
        if word in ("-e", "--env") and match:
            inside[match["name"]] = match["value"]
        if word == "--entrypoint":
            entrypoint = value.split()
    if index >= len(words):
        raise ConfigError("--command: this `docker run` names no image; paste it whole")
    image = words[index]
    yield from _server(entrypoint + words[index + 1 :], inside, image)


def _expanded(word: str, known: Mapping[str, str]) -> str:
    """``word`` with the variables that the text sets; others stay as they are, for the one who reads the option."""

    def value(match: re.Match[str]) -> str:
        name = match["braced"] or match["k8s"] or match["bare"]
        return known.get(name, match["default"] if match["default"] is not None else match[0])

    return _VARIABLE.sub(value, word)


def _shown(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


# --------------------------------------------------------------------------------------------------------------- YAML


def _looks_like_yaml(text: str) -> bool:
    first = text.lstrip()
    if first.startswith(("[", "{", "---")):
        return True
    line = first.splitlines()[0]
    return bool(re.match(r"-\s+\S", first)) or bool(re.match(r"[\w./-]+:(\s|$)", line))


def _from_yaml(text: str) -> Iterator[ServeCall]:
    import yaml

    try:
        documents = list(yaml.safe_load_all(text))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        where = getattr(error, "problem_mark", None)
        at = "" if where is None else f" (line {where.line + 1})"
        raise ConfigError(f"--command: this looks like YAML or JSON, and is not valid{at}; {_HOW}") from error
    for document in documents:
        if isinstance(document, list) and all(_is_word(item) for item in document):
            yield from _server([str(item) for item in document], {}, None)
            continue
        for container in _containers(document):
            yield from _container(container)


def _containers(document: Any) -> Iterator[Mapping[str, Any]]:
    """Every mapping in a manifest that says what to run."""
    left, seen = [document], 0
    while left:
        node = left.pop()
        seen += 1
        if seen > _MOST_NODES:
            raise ConfigError("--command: the manifest is too large; paste the one container that runs vLLM")
        if isinstance(node, Mapping):
            if any(isinstance(node.get(key), list | str) for key in ("args", "command")):
                yield node
            left += [value for key, value in node.items() if key not in ("args", "command")]
        elif isinstance(node, list):
            left += node


def _container(container: Mapping[str, Any]) -> Iterator[ServeCall]:
    environment = dict(_environment(container.get("env") or container.get("environment")))
    image = container.get("image")
    image = image if isinstance(image, str) else None
    words = [*_listed(container.get("command")), *_listed(container.get("args"))]
    words = [_straight_dashes(_expanded(word, environment)) for word in words]
    if words:
        yield from _server(words, environment, image)


def _listed(value: Any) -> list[str]:
    if isinstance(value, str):
        return [word for line in _logical_lines(value) for words in _simple_commands(line) for word in words]
    return [str(item) for item in value or () if _is_word(item)]


def _environment(value: Any) -> Iterable[tuple[str, str]]:
    """Kubernetes' list of names and values, compose's list of NAME=value, or a mapping."""
    if isinstance(value, Mapping):
        return [(str(name), str(given)) for name, given in value.items() if _is_word(given)]
    found = []
    for item in value if isinstance(value, list) else ():
        if isinstance(item, Mapping) and _is_word(item.get("value")):
            found.append((str(item.get("name")), str(item["value"])))
        elif isinstance(item, str) and (match := _ASSIGNMENT.fullmatch(item)):
            found.append((match["name"], match["value"]))
    return found


def _is_word(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)
