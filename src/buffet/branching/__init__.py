"""Branch and bound: a region is cut until every part is proven, where the bounds lose the most."""
