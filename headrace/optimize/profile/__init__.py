"""Where the time of a served workload goes, op by op, against what the machine can do."""
