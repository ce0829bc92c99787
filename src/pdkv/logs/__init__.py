"""What a running vLLM says about itself: start-up logs and metrics texts -> facts. Nothing is judged here."""
