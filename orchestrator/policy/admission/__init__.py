"""Which requests are taken, and which of them go behind others: by their objectives, and by the shares of tenants."""
