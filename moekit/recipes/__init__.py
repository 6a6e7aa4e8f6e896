"""Recipes: one readable loop each, functions of a config that run on one process or many."""
