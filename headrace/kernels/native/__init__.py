"""Kernels in C++: how they are called, built, and put into the op table."""
