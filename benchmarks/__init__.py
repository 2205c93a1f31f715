"""Speed and accuracy tables, each made by `python -m benchmarks NAME`."""
