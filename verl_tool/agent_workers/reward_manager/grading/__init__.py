"""Building blocks of reward managers: samples, answers, tests of code, and reward terms."""
