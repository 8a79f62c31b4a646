"""Operations on 8-bit quantized arrays that return codes again: the layers between contractions of integer networks."""
