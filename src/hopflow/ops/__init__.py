"""Operations, one record each, and the public functions composed of them."""
