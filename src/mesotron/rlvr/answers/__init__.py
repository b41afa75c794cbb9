"""How an answer is read from a completion and compared with the right one."""
