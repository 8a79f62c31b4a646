"""Tests of jaxquant.lora."""
