"""One file for each task; its name is the task's."""
