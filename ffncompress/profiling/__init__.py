"""The measurement by itself: a study of any models on any texts, as data, figures and a page that people look at."""
