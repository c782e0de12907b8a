"""Expert parallelism: topology, exchange plans and their execution."""
