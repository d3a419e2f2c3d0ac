"""Catalogues: the products of a shop, its goals and its search; read from WebShop's files or generated."""
