"""Completions from captured graphs: how a token is drawn, and who computes its logits."""
