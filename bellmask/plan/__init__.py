"""What a run will cost before it is started: parameters, memory, storage, time."""
