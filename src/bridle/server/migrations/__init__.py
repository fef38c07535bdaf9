"""The database's migrations, one file per step; `bridle.server.store` brings a database to the last
one when it opens it.
"""
