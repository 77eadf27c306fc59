"""Processes that begin with their imports done: they are forked from one that has torch, verl and vLLM loaded.

Else each process of a training loads them for itself, which takes ten seconds or more of a core, one after the other.
Not on GPUs, where a process must not be forked once CUDA is loaded in it.
"""
