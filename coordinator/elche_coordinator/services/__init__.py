"""gRPC services, and what they share.

A call passes `interceptor` (who calls, and may it?) and `validation` (lengths and ranges of the message); then a
`*_service` translates it. `submission` checks a submitted job, `requests` changes jobs for gRPC and the page alike.
"""
