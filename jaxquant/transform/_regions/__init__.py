"""The parts of a traced program that stay in codes: from one contraction to the next, without floats in between."""
