"""Problems with a checkable answer: generated, from GSM8K or MATH files, or from a user's table."""
