"""Side-by-side runs of Headrace and its peers; `scripts/bench` is their front door."""
