"""Problems with a verifiable answer.

`registry` says what a task is, and `builtin/` has one file for each. `load` reads the task that a
config names. `own` reads a user's data (`--data`), `path` tasks from elsewhere, and `table`
the rows of both. `generated` draws problems that follow from a seed, `gym` those of reasoning-gym.
`prompts` writes problems for a model, and `rows` makes datasets of them.
"""
