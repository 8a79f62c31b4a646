"""Hadamard matrices: orthogonal but for a factor, with entries of 1 and -1."""

from __future__ import annotations

import functools

import numpy as np


def find_block(size: int) -> int:
    """Return the largest divisor of a size for which `make_hadamard` has a matrix."""
    # 1 divides every size and has a matrix, so that there is always a part.
    return next(part for part in range(size, 0, -1) if size % part == 0 and _find_base(part) is not None)


@functools.cache
def make_hadamard(size: int) -> np.ndarray:
    """Return a Hadamard matrix H with H H^T = size * I, of int8.

    The sizes are 2^k, and 2^k times q + 1 for primes q = 3 mod 4, or 2 (q + 1) for primes q = 1 mod 4: among them 12,
    20, 24, 28, 36, 44, 48, and so 384, 768 and 1536.

    Source: Sylvester, Philosophical Magazine 34 (1867); Paley, Journal of Mathematics and Physics 12 (1933), pages 311
    to 320.
    """
    base = _find_base(size)
    assert base is not None
    matrix = _make_paley(base) if base > 1 else np.ones((1, 1), np.int8)
    while len(matrix) < size:
        matrix = np.kron(np.array([[1, 1], [1, -1]], np.int8), matrix)
    return matrix


def _find_base(size: int) -> int | None:
    """Return the size of Paley's matrix, or 1, that doublings make the size; or None."""
    base = size
    while base > 1:
        if _find_prime(base) is not None:
            return base
        if base % 2:
            return None
        base //= 2
    return base


def _find_prime(size: int) -> int | None:
    """Return the prime of which Paley's construction makes a matrix of a size that is not a power of 2, or None."""
    # Powers of 2 are doublings of the matrix of size 1, which is cheaper than a table of residues.
    if size & (size - 1) == 0:
        return None
    for prime, remainder in ((size - 1, 3), (size // 2 - 1, 1)):
        is_even = remainder == 3 or size % 2 == 0
        if is_even and prime > 2 and prime % 4 == remainder and all(prime % n for n in range(2, int(prime**0.5) + 1)):
            return prime
    return None


def _make_paley(size: int) -> np.ndarray:
    prime = _find_prime(size)
    assert prime is not None
    residues = np.full(prime, -1, np.int8)
    residues[np.arange(1, prime) ** 2 % prime] = 1
    residues[0] = 0
    core = residues[(np.arange(prime)[:, None] - np.arange(prime)) % prime]
    border = np.ones((prime, 1), np.int8)
    corner = np.zeros((1, 1), np.int8)
    # -1 is no square then, and the bordered core S is skew-symmetric: (S + I) (S + I)^T = S S^T + I = (prime + 1) I.
    if prime % 4 == 3:
        return np.block([[corner, border.T], [-border, core]]) + np.eye(size, dtype=np.int8)
    # Here S is symmetric, and its diagonal of zeros has to be filled: each entry becomes a block of 2 x 2.
    conference = np.block([[corner, border.T], [border, core]])
    pair = np.array([[1, 1], [1, -1]], np.int8)
    return np.kron(conference, pair) + np.kron(np.eye(prime + 1, dtype=np.int8), np.array([[1, -1], [-1, -1]], np.int8))
