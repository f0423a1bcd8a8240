"""Models on bound ops, and what runs them."""

PAGE_SIZE = 16  # tokens whose keys and values lie together
