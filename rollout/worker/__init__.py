"""A worker: it leases groups, has them sampled and scored, and puts them."""
