"""The tiny model in an environment of verifiers and on a server of OpenEnv."""
