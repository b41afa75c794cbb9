"""The study of `mesotron watch --forecast`: how often is it right about the rest of a run?"""
