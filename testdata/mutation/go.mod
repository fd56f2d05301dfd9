module ipvs.test/mutation

go 1.24
