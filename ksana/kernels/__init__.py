"""Kernel backends: the operators that models are written against, one implementation per device."""
