"""verl's trainers with what tools add: faults, records, metrics."""
