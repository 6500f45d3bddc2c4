"""The algorithms, one file each, found by the file's name: `algorithm.advantage_estimator`. docs/algorithms.md says how to add one."""
