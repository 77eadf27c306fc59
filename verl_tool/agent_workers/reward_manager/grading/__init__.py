"""What reward managers grade with: samples, answers, tests of code, and reward terms."""
