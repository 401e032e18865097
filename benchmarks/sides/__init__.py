"""One child program per side of a run, each started with the interpreter that its engine lives in."""
