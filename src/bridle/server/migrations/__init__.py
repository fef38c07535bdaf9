"""Migrations of the database, one file per step; `bridle.server.database` applies them."""
