jade
