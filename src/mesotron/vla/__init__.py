"""Vision-language-action: worlds, demonstrations, a policy, behavior cloning, evaluation."""
