"""Visits: pages, actions and the score of a purchase; and the shop in a terminal."""
