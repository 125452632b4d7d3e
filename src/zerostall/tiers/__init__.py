"""Places where images rest. One file a tier; `contract` says what each must do."""
