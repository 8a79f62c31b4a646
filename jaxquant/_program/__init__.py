"""Traced programs: their contractions, the parameters in them, and their evaluation with other contractions."""
