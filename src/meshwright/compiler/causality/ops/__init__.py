"""One file for each family of ops: how what is known and what is depended on go through them."""
