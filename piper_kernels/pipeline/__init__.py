"""PP x EP: the resource model, plans and their execution."""
