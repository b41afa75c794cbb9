"""Problems with a verifiable answer: generated, from GSM8K or MATH, or from a user's table."""
