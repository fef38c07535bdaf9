fjord
