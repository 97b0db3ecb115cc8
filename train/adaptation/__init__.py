"""Online adaptation of a drafter to the traffic it serves: collect, learn, prove, and undo."""
