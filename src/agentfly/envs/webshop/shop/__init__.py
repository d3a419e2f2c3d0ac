"""Visits: pages, actions and the score of a purchase; and the shop as a web page or in a terminal."""
