"""Vision-language-action policies: worlds, demonstrations, a policy, behaviour cloning, success."""
