"""The improvement loop: profile, propose, judge, publish, roll out."""
