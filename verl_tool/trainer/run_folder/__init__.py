"""The folder of a run: who writes into it, what earlier starts left there, and checkpoints that are whole."""
