"""What tests share: laws, families of models, whether a call changed anything, processes."""
