"""The ground floor: errors, files, random numbers and labels that all other packages use."""
