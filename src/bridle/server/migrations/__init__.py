"""The database's migrations, one file per step; `bridle.server.state` brings a database to the last
one when it opens it.
"""
