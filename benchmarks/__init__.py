"""Side-by-side measurements of the fork and the untouched base."""
